"""A sweep of calls, written once and evaluated with numpy or PyTorch and with pyops: values, gradients, weights, buffers."""
import numpy as np
import pytest

import pyops
from pyops import functional as F
from pyops import ndarray, nn, optim
from pyops.autograd import Tensor

RNG = np.random.default_rng(20)
ARRAYS = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in dict(
    x=(3, 4), y=(3, 4), z=(2, 3, 4), v=(4,), s=(4, 4), im=(2, 4, 7, 6), seq=(2, 4, 9), vol=(1, 2, 4, 5, 6),
    tbc=(5, 2, 4), gr=(2, 3, 5, 2), gv=(1, 2, 3, 2, 3), th=(2, 2, 3), tv=(1, 3, 4), w3=(2, 3, 3, 2, 2)).items()}
ARRAYS['p'] = np.abs(ARRAYS['x']) + np.float32(0.1)
IDS = dict(i=np.array([[0, 2, 1], [2, 2, 0]]), k=np.array([2, 0, 1]), m=ARRAYS['x'] > 0.2)

# of arrays x, y, p (3, 4), z (2, 3, 4), v (4,), s (4, 4), indices i, k and a mask m; np: numpy
NUMPY = '''
x+y; x-v; x*2; 3-x; x/p; 1/p; x//p; x%p; -x; +x; abs(x); p**2; p**v; 2**x; x@s; x@v; z@s; v@v; x<y; x<=0; x==y; x!=y; ~m;
m&(x>0); m|m; m^(y>0);
x[1]; x[1,2]; x[-1]; x[:,1:3]; x[::2,::-1]; x[...,0]; x[None]; x[:,None,1]; x[m]; x[k]; x[k,:2]; x[[0,2],[1,3]]; z[1,:,k];
z[:,[1,0]]; x[x>0]; z[...,None,:];
x.sum(); x.sum(0); x.sum((0,1)); x.sum(axis=-1,keepdims=True); x.mean(1); z.mean((0,2)); x.max(0); x.min(1,keepdims=True);
x.argmax(1); x.argmin(); x.argmax(axis=0); x.var(0); x.std(1,ddof=1); p.prod(1); x.any(0); m.all(1); x.cumsum(1);
p.cumprod(0);
x.reshape(4,3); x.reshape(-1); x.reshape((2,-1)); x.T; z.transpose(2,0,1); z.transpose((1,0,2)); z.swapaxes(0,2); x.ravel();
x.flatten(); z.squeeze(); x[None].squeeze(0); x.repeat(2,1); x.repeat([1,2,3],axis=0); x.take([0,2],1); x.diagonal();
s.trace(); x.clip(-.5,.5); x.round(1); x.copy(); x.astype('int32'); x.nonzero()[0]; v.tolist(); x.item(3); x.dot(s); x.size;
x.ndim; x.shape; x.nbytes; len(x);
np.exp(x); np.log(p); np.sqrt(p); np.sin(x); np.cos(x); np.tan(x); np.tanh(x); np.arctan(x); np.arcsin(x/4); np.arccos(x/4);
np.sinh(x); np.cosh(x); np.expm1(x); np.log1p(p); np.log2(p); np.log10(p); np.floor(x); np.ceil(x); np.trunc(x); np.sign(x);
np.square(x); np.abs(x); np.reciprocal(p); np.isnan(x); np.isfinite(x); np.isinf(x); np.logical_not(m); np.negative(x);
np.add(x,y); np.subtract(x,1); np.multiply(2,x); np.divide(x,p); np.power(p,2); np.maximum(x,y); np.minimum(x,0);
np.hypot(x,y); np.arctan2(x,y); np.logaddexp(x,y); np.fmod(x,p); np.mod(x,p); np.greater(x,y); np.less_equal(x,v);
np.logical_and(m,x>0); np.logical_or(m,x>0); np.matmul(x,s); np.dot(v,v); np.outer(v,v); np.inner(x,y);
np.einsum('ij,kj->ik',x,y); np.einsum('bij->bji',z); np.tensordot(x,s,1); np.vdot(v,v); np.kron(v,v);
np.cross(x[:,:3],y[:,:3]);
np.sum(x,axis=0); np.mean(x,1); np.max(x); np.min(z,axis=(0,1)); np.var(x,axis=1,ddof=1); np.std(x); np.prod(p,0);
np.cumsum(x); np.cumprod(p,1); np.argmax(x,1); np.argsort(x,1); np.sort(x,0); np.sort(x,axis=None); np.median(x,1);
np.quantile(x,.3); np.percentile(x,40,axis=0); np.ptp(x,1); np.any(m,1); np.all(m); np.count_nonzero(m); np.diff(x);
np.nansum(x,0); np.nanmean(x); np.average(x,axis=0); np.linalg.norm(x); np.linalg.norm(x,axis=1); np.linalg.det(s);
np.linalg.inv(s); np.trace(s); np.cov(x); np.histogram(x,3)[0]; np.bincount(k); np.unique(k); np.searchsorted(np.sort(v),0.1);
np.reshape(x,(4,3)); np.transpose(z,(2,0,1)); np.swapaxes(z,0,1); np.moveaxis(z,0,-1); np.expand_dims(x,1);
np.squeeze(x[None],0); np.ravel(x); np.concatenate([x,y],1); np.concatenate([x,y]); np.stack([x,y],1); np.vstack([x,v]);
np.hstack([x,y]); np.split(x,2,1)[1]; np.array_split(v,3)[0]; np.tile(x,(2,1)); np.repeat(x,2,0); np.roll(x,1,1);
np.flip(x,0); np.rot90(x); np.where(m,x,y); np.where(x>0,1.0,x); np.take(x,[1,0],axis=1);
np.take_along_axis(x,np.argsort(x,1),1); np.pad(x,1); np.pad(x,((1,0),(0,2)),constant_values=3.); np.broadcast_to(v,(3,4));
np.tril(s); np.triu(s,1); np.diag(v); np.diagonal(s,1); np.clip(x,-1,None); np.round(x,2); np.zeros_like(x); np.ones_like(z);
np.full_like(x,2.); np.allclose(x,x); np.array_equal(x,y); np.isclose(x,x); np.append(v,v); np.delete(v,1); np.insert(v,1,5.);
np.arcsinh(x); np.arccosh(p+1); np.arctanh(x/4); np.exp2(x); np.deg2rad(x); np.copysign(x,y); np.fmax(x,y); np.fmin(x,0);
v.compress([1,0,1]); x.compress([True,False,True],axis=0); np.sort(v).searchsorted(x);
np.sort(v).searchsorted(0.1,side='right'); np.frombuffer(x.T.tobytes(),np.float32); np.atleast_2d(v); np.column_stack([v,v]);
np.meshgrid(v,v)[0]; np.interp(v,np.sort(v),np.sort(v)); np.digitize(v,np.sort(v)); np.nan_to_num(x); np.shape(x); np.size(x);
np.ndim(x); np.copy(x); np.asarray(x); np.array(x);
'''
# with gradients; f: torch or pyops, F: functional
TORCH = '''
x+y; x-v; x*y; x/p; p**x; x@s; x.matmul(v); f.exp(x); f.log(p); f.sqrt(p); f.tanh(x); f.sigmoid(x); f.sin(x); f.abs(x);
f.relu(x); f.square(x); f.rsqrt(p); f.erf(x); f.expm1(x); f.log1p(p); f.atan2(x,y); f.hypot(x,y); f.lerp(x,y,.3);
f.clamp(x,-.5,.5); f.maximum(x,y); f.minimum(x,y); f.where(m,x,y); f.addcmul(x,y,p,value=2); f.addmm(x,x,s); f.logaddexp(x,y);
f.fmod(x,p); f.remainder(x,p); f.xlogy(x,p); f.frac(x); f.sinh(x); f.acos(x/4);
f.sum(x,1); f.mean(x,0,keepdim=True); f.logsumexp(x,1); f.softmax(x,1); f.log_softmax(x,0); f.var(x,1);
f.std(x,0,keepdim=True); f.prod(x,1); f.cumsum(x,1); f.cumprod(p,0); f.norm(x); f.norm(x,dim=1); f.amax(x,1); f.amin(x,0);
f.median(x); f.sort(x,1)[0]; f.topk(x,2,1)[0]; f.kthvalue(x,2,1)[0]; f.cummax(x,0)[0]; f.quantile(x,.4,1); f.dist(x,y);
f.diff(x); f.nansum(x,1); f.var_mean(x,1)[0]; x.argmax(1).float()*x[:,0]; f.allclose(x,x);
f.reshape(x,(4,3)); f.transpose(x,0,1); f.permute(z,(2,0,1)); f.squeeze(x[None],0); f.unsqueeze(x,1); f.flatten(z,1);
f.cat([x,y],1); f.stack([x,y],-1); f.split(x,2,1)[1]; f.chunk(x,2,1)[0]; f.unbind(z,1)[2]; f.flip(x,[0]); f.roll(x,1,1);
f.tile(x,(2,1)); f.repeat_interleave(x,2,1); f.gather(x,1,i[:, :2].clamp(0,1)); f.index_select(x,0,k); x.index_add(0,k,y);
x.scatter_add(1,i,y[:2,:3]); x.masked_fill(m,0.); f.masked_select(x,m); f.take_along_dim(x[:2],i,1); f.tril(s); f.triu(s,1);
f.diag(v); f.diagonal(s,1); f.trace(s); f.narrow(x,1,1,2); x.unfold(1,2,1); f.movedim(z,0,2); x[k]; x[m]; x[1:,::2]; z[:,k,1];
x.expand(2,3,4); x.view(-1,2); f.outer(v,v); f.einsum('ij,kj->ik',x,y); f.bmm(z,z.transpose(1,2)); f.mv(x,v); f.dot(v,v);
f.tensordot(x,y,dims=([1],[1])); f.meshgrid(v,v,indexing='ij')[0];
F.relu(x); F.gelu(x); F.gelu(x,approximate='tanh'); F.silu(x); F.elu(x,.5); F.selu(x); F.celu(x); F.mish(x); F.softplus(x,2.);
F.leaky_relu(x,.2); F.hardtanh(x); F.relu6(x*4); F.hardswish(x); F.hardsigmoid(x); F.softsign(x); F.tanhshrink(x);
F.softshrink(x,.2); F.hardshrink(x,.2); F.logsigmoid(x); F.glu(x); F.threshold(x,.1,2.); F.prelu(x,v[:1]); F.softmin(x,1);
F.normalize(x,dim=1); F.cosine_similarity(x,y); F.pairwise_distance(x,y); F.linear(x,s,v); F.bilinear(x,y,z.expand(2,3,4)[:,
:1].expand(2,4,4)); F.layer_norm(x,(4,),v,v); F.dropout(x,0.); F.local_response_norm(im,3);
F.conv2d(im,im[:,:,:3,:2]); F.conv2d(im,im[:,:2,:3,:2],None,2,1,1,2); F.conv1d(seq,seq[:,:,:3],padding=1);
F.conv3d(vol,vol[:,:,:2,:2,:2]); F.conv_transpose2d(im,im[:1].expand(4,4,7,6)[:,:3,:3,:3],stride=2); F.max_pool2d(im,2);
F.max_pool2d(im,3,2,1); F.avg_pool2d(im,2,ceil_mode=True); F.avg_pool2d(im,3,1,1,count_include_pad=False);
F.max_pool1d(seq,3); F.avg_pool1d(seq,2); F.max_pool3d(vol,2); F.avg_pool3d(vol,2,1,1); F.adaptive_avg_pool2d(im,(3,2));
F.adaptive_max_pool2d(im,2); F.adaptive_avg_pool1d(seq,4); F.interpolate(im,scale_factor=2);
F.interpolate(im,size=(5,9),mode='bilinear',align_corners=False); F.pad(im,(1,2,0,1)); F.pad(im,(1,1,2,1),mode='reflect');
F.pad(im,(1,1,1,1),value=3.); F.unfold(im,2); F.pixel_shuffle(im,2); F.embedding(i,x);
F.cross_entropy(x,k); F.cross_entropy(x,k,label_smoothing=.1); F.cross_entropy(x,p/p.sum(1,True));
F.nll_loss(x,k,v.detach().abs()); F.mse_loss(x,y); F.l1_loss(x,y,reduction='sum'); F.smooth_l1_loss(x,y,beta=.5);
F.huber_loss(x,y,delta=.3); F.binary_cross_entropy_with_logits(x,m.float()); F.binary_cross_entropy(x.sigmoid(),m.float());
F.kl_div(x,y.softmax(1).detach(),reduction='batchmean'); F.triplet_margin_loss(x,y,p);
F.hinge_embedding_loss(x,y.sign().detach()); F.margin_ranking_loss(x,y,p.sign().detach());
F.cosine_embedding_loss(x,y,k.float().sign()*2-1); F.soft_margin_loss(x,y.sign().detach()); F.poisson_nll_loss(x,p.detach());
F.gaussian_nll_loss(x,y,p); F.multi_margin_loss(x,k);
F.grid_sample(im,gr,align_corners=True); F.grid_sample(im,gr*1.5,padding_mode='border',align_corners=False);
F.grid_sample(im,gr*2,padding_mode='reflection',align_corners=False); F.grid_sample(im,gr,'nearest',align_corners=False);
F.grid_sample(im,gr*2,padding_mode='reflection',align_corners=True); F.grid_sample(vol,gv,align_corners=False);
F.affine_grid(th,(2,4,5,3),align_corners=False); F.affine_grid(th,(2,4,5,2),align_corners=True);
F.affine_grid(tv,(1,2,3,4,2),align_corners=False); F.grid_sample(im,F.affine_grid(th,(2,4,5,3),False),align_corners=False);
F.interpolate(im,size=(4,11),mode='bicubic',align_corners=False);
F.interpolate(im,size=(9,1),mode='bicubic',align_corners=True);
F.interpolate(vol,size=(3,7,4),mode='trilinear',align_corners=False); F.interpolate(vol,scale_factor=2);
F.interpolate(im,scale_factor=1.7,mode='nearest-exact'); F.interpolate(vol,size=(3,2,4),mode='area');
F.adaptive_avg_pool3d(vol,(3,2,4)); F.adaptive_avg_pool3d(vol,(None,5,3)); F.adaptive_max_pool3d(vol[0],(3,2,6));
F.conv_transpose3d(vol,w3,v[:3]); F.conv_transpose3d(vol,w3,None,(2,1,3),(1,0,1),(1,0,2),2);
F.conv_transpose3d(vol[0],w3,None,1,0,(1,0,0),1,2); F.lp_pool1d(seq,2,3,2); F.lp_pool2d(im.exp(),3.,2,ceil_mode=True);
F.lp_pool3d(vol,2,2); F.rrelu(x); F.relu_(x*2)*x; F.elu_(x*2,.5)*x; F.celu_(x*2,alpha=.5)*x; F.selu_(x*2)*x;
F.leaky_relu_(x*2,.2)*x; F.hardtanh_(x*2,-.3,.4)*x; F.threshold_(x*2,.1,.2)*x; F.rrelu_(x*2)*x; F.relu(x*2,inplace=True)*x;
F.silu(x*2,True)*x; F.mish(x*2,True)*x; F.hardswish(x*2,inplace=True)*x; F.hardsigmoid(x*2,True)*x; F.relu6(x*9,True)*x;
F.dropout(x*2,0.,True,True)*x;
'''
# functions and methods in pyops/further_methods.py, and functions of several arrays
FURTHER = '''
f.exp2(x); f.erfc(x); f.asinh(x*3); f.acosh(p+1); f.atanh(x/4); f.arctanh(x/4); f.deg2rad(x); f.rad2deg(x); f.sinc(x);
f.signbit(x); f.copysign(x,y.detach()); f.heaviside(x.detach(),v.detach()); f.fmax(x,y); f.fmin(x,y); f.logaddexp2(x,y);
f.sgn(x.detach()); f.isposinf(x/0); f.isneginf(x/0); f.bitwise_and(k,i[1]); f.bitwise_or(m,m); f.bitwise_xor(k,i[0]);
f.bitwise_not(m); ~k; f.bitwise_left_shift(k,i[0]); f.bitwise_right_shift(k,i[0]); f.ldexp(x,k[:1]); f.msort(x);
f.mode(i,1)[0]; f.mode(x.detach().round(),0)[0]; f.unique_consecutive(x.detach()[[0,0,1,0]],dim=0);
f.unique_consecutive(i,return_inverse=True,return_counts=True); f.logcumsumexp(x*9,1); f.histc(x.detach(),5,-1.,1.);
f.histc(x.detach(),4); f.vdot(v,v); f.ger(v,x[:,0]); f.addmv(x[:,0],y,v,beta=.5,alpha=2); f.addr(x,y[:,1],v);
f.addbmm(s[:3,:3],z,z.transpose(1,2)); f.baddbmm(z[:,:,:3],z,z.transpose(1,2),alpha=.5); f.kron(x,v); f.kron(z,x);
f.cross(x[:,:3],y[:,:3],dim=1); x[:3,:3].cross(y[:3,:3],0); f.cov(x); f.cov(v); f.cov(x,correction=0); f.corrcoef(x);
f.matrix_power(s,3); f.matrix_power(s,0); f.matrix_power(s,-2); f.inverse(s); s.det(); f.slogdet(s)[1];
f.slogdet(s.detach())[0]; f.logdet(s@s.T); f.det(f.stack([s,s.T])); f.rot90(z,1,(0,2)); f.rot90(x,2); f.rot90(x,-1);
x.hsplit(2)[1]; f.vsplit(x,[1])[1]; f.dsplit(z,2)[0]; f.split_with_sizes(x,[1,3],1)[1]; f.diag_embed(x);
f.diag_embed(x,-1,0,2); f.diagflat(x,1); x.index_put((k,),v); x.index_put((k[[0,0,1]],k[[1,1,0]]),v[:3],accumulate=True);
x.masked_scatter(m,y); f.scatter_reduce(x,1,i,y[:2,:3],'sum'); x.scatter_reduce(1,i,y[:2,:3],'mean',include_self=False);
x.scatter_reduce(1,i,y[:2,:3],'amax'); x.scatter_reduce(0,i,y[:2,:3],'prod');
x.scatter_reduce(1,i,y[:2,:3],'amin',include_self=False); f.select_scatter(x,v,0,1); f.slice_scatter(x,y[:,:2],1,0,4,2);
z.sum_to_size(3,1); f.std_mean(x,1); f.clamp_min(x,.1); f.clamp_max(x,.1); f.atleast_1d(x.sum());
f.atleast_2d(v); f.atleast_3d(x); f.atleast_3d([v,x]); f.broadcast_tensors(x,v)[1]; f.block_diag(x,v,s);
f.cartesian_prod(v,x[0]); f.combinations(v,3); f.combinations(v,with_replacement=True); f.tril_indices(3,4,1);
f.triu_indices(4,3); f.vander(v.detach()); f.vander(v.detach(),3,True); f.chain_matmul(x,s,s); f.cdist(x,y);
f.cdist(z,z[:,:2]+1,1.); F.pdist(x); f.trapezoid(x); f.trapz(x,dim=0,dx=.5); f.trapezoid(x,v);
f.cumulative_trapezoid(x,dim=1); f.dstack([x,y]); f.row_stack([x,v]); f.searchsorted(f.sort(v.detach())[0],x.detach());
f.searchsorted(f.tensor([1,2,2,3]),k,right=True); f.searchsorted(f.sort(x.detach(),1)[0],y.detach(),side='right');
f.bucketize(x.detach(),f.tensor([-1.,0.,1.])); f.isin(k,i[1]); f.isin(k,i[0],invert=True); f.prelu(x,v[:1]); f.selu(x);
f.hardshrink(x); f.conv3d(vol,w3.transpose(0,1)[:,:2]); f.rrelu(x); f.pairwise_distance(x,y); f.group_norm(im,2,v,v);
f.pixel_shuffle(im,2); f.is_tensor(x); f.is_nonzero(f.tensor(1.)); f.numel(x); f.clamp_(x*2,-1,1)*x; f.exp_(x*2)*x;
(x*2).fill_diagonal_(0.)*x; f.neg_(x*2)*x; (x*2).copysign_(y.detach()); (x*2).atan2_(y); (x*2).unsqueeze_(1)*x;
(x*2)[None].squeeze_(0)*x; (x*2).t_()@x; (z*2).transpose_(0,2)@z[:,0]; (x*2).index_put_((k,),v)*y; x.is_signed();
m.is_signed(); x.is_same_size(y); x.is_complex(); x.is_cuda; f.linalg.norm(x); f.linalg.norm(x,dim=1); f.linalg.norm(s,'fro');
f.linalg.vector_norm(z,3,(0,2)); f.linalg.vector_norm(x); f.linalg.matrix_norm(z); f.linalg.matrix_norm(z,1);
f.linalg.matrix_norm(s,float('inf')); f.linalg.inv(s); f.linalg.det(s); f.linalg.slogdet(s)[1]; f.linalg.solve(s,x.T);
f.linalg.solve(s,v); f.linalg.solve(f.stack([s,s.T]),z.transpose(1,2)); f.linalg.matrix_power(s,2);
f.linalg.multi_dot([x,s,v]); f.linalg.cross(x[:,:3],y[:,:3]); f.linalg.vecdot(x,y); f.linalg.diagonal(z);
f.linalg.matrix_rank(x.detach()); f.linalg.pinv(x.detach()); f.linalg.svdvals(x.detach());
f.linalg.eigvalsh((s@s.T).detach()); f.linalg.cholesky((s@s.T).detach()); f.linalg.lstsq(x.detach().T,v.detach()[:,None])[0];
f.linalg.qr(s.detach())[1].abs(); f.linalg.eigh((s@s.T).detach())[0]; f.linalg.svd(x.detach(),full_matrices=False)[1];
f.linalg.solve_triangular(s.detach().triu(),x.detach().T,upper=True);
'''
LAYERS = '''
Linear(4,5)(x); Linear(4,5,bias=False)(z); Bilinear(4,4,3)(x,y); LayerNorm(4)(z); LayerNorm((3,4))(z); RMSNorm(4)(x);
GroupNorm(2,4)(im); InstanceNorm2d(4,affine=True)(im); BatchNorm1d(4)(x); BatchNorm1d(4)(seq); BatchNorm2d(4)(im);
BatchNorm2d(4,momentum=None)(im); BatchNorm3d(2)(vol); BatchNorm2d(4).eval()(im); Embedding(5,3)(i);
Embedding(5,3,padding_idx=2)(i); PReLU(4)(im);
Conv1d(4,6,3)(seq); Conv1d(4,6,3,stride=2,padding=1,dilation=2,groups=2)(seq); Conv2d(4,6,3)(im);
Conv2d(4,6,(3,2),(2,1),(1,0),bias=False)(im); Conv2d(4,6,3,padding='same',dilation=2)(im);
Conv2d(4,6,3,padding=1,padding_mode='reflect')(im); Conv2d(4,4,3,groups=4)(im); Conv3d(2,4,2)(vol);
Conv3d(2,4,2,padding=1,stride=2)(vol); ConvTranspose1d(4,6,3,2)(seq);
ConvTranspose2d(4,6,3,stride=2,padding=1,output_padding=1)(im);
RNN(4,6)(tbc); RNN(4,6,2,nonlinearity='relu',bidirectional=True)(tbc); LSTM(4,6)(tbc); LSTM(4,6,2,bidirectional=True)(tbc);
LSTM(4,6,batch_first=True,bias=False)(z); GRU(4,6)(tbc); GRU(4,6,2,batch_first=True)(z); RNNCell(4,6)(x); LSTMCell(4,6)(x);
GRUCell(4,6)(x); GRU(4,6)(z[0]);
MultiheadAttention(4,2)(tbc,tbc,tbc); MultiheadAttention(4,2,batch_first=True)(z,z,z);
MultiheadAttention(4,2,kdim=4,vdim=4)(z,z,z); TransformerEncoderLayer(4,2,8,0.)(tbc);
TransformerEncoderLayer(4,2,8,0.,'gelu',batch_first=True,norm_first=True)(z); TransformerDecoderLayer(4,2,8,0.)(tbc,tbc);
Transformer(4,2,1,1,8,0.)(tbc,tbc);
Sequential(Linear(4,5),ReLU(),Linear(5,2))(x);
Sequential(Conv2d(4,2,3),BatchNorm2d(2),ReLU(),MaxPool2d(2),Flatten(),Linear(8,3))(im);
Sequential(Linear(4,4),LayerNorm(4),GELU(),Softmax(1))(x); MaxPool2d(3,2,1)(im); AvgPool2d(2)(im); MaxPool3d(2)(vol);
InstanceNorm3d(2,affine=True)(vol); AdaptiveAvgPool3d((3,2,4))(vol); AdaptiveMaxPool3d(2)(vol); LPPool1d(2,3)(seq);
LPPool2d(2,(3,2))(im); LPPool3d(2,2)(vol); RReLU().eval()(im); ReplicationPad3d(1)(vol); ReflectionPad3d((1,2,3,1,0,1))(vol);
CircularPad3d(2)(vol); ConstantPad3d((1,-1,0,2,1,1),3.)(vol); ZeroPad3d(1)(vol); ConvTranspose3d(2,4,2,2,bias=False)(vol);
ConvTranspose3d(2,4,(3,2,2),stride=2,padding=1,output_padding=(1,0,1),groups=2)(vol); UpsamplingBilinear2d((5,9))(im);
ConvTranspose3d(2,3,3,(2,1,1))(vol,output_size=[10,7,8]); FeatureAlphaDropout(.5).eval()(im);
Upsample(scale_factor=2,mode='trilinear')(vol);
Upsample(scale_factor=2)(im); Unfold(3)(im); PixelShuffle(2)(im); ReflectionPad2d(1)(im); LocalResponseNorm(2)(im);
'''


def calls(text):
    found = text.replace('\n', ' ')
    return [' '.join(one.split()) for one in found.split(';') if one.strip()]


def numbers(y):
    """Return the arrays of nested results as numpy arrays."""
    if isinstance(y, tuple | list):
        return [one for part in y for one in numbers(part)]
    y = y.detach() if hasattr(y, 'detach') else y
    return [np.asarray(y.numpy() if hasattr(y, 'numpy') else y)]


def same(got, want, rtol=1e-4):
    got, want = numbers(got), numbers(want)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and (one.dtype.kind == 'b') == (other.dtype.kind == 'b')
        np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=rtol, atol=rtol)


@pytest.mark.parametrize('kind', [ndarray.array, Tensor])
@pytest.mark.parametrize('call', calls(NUMPY))
def test_calls_of_numpy(call, kind):
    theirs = {name: value.copy() for name, value in (ARRAYS | IDS).items()}
    ours = {name: kind(value) for name, value in theirs.items()}
    same(eval(call, {'np': np}, ours), eval(call, {'np': np}, theirs))


def both(torch):
    """Return the names of a call for PyTorch and for pyops: leaves of the arrays."""
    theirs = {name: torch.tensor(value, requires_grad=True) for name, value in ARRAYS.items()} | {
        name: torch.tensor(value) for name, value in IDS.items()}
    ours = {name: Tensor(value, requires_grad=True) for name, value in ARRAYS.items()} | {
        name: Tensor(value) for name, value in IDS.items()}
    return theirs, ours


def first_floats(y):
    return next((one for one in (y if isinstance(y, tuple) else (y,)) if getattr(one, 'requires_grad', False)), None)


def same_gradients(torch, y, want, ours, theirs):
    y, want = first_floats(y), first_floats(want)
    assert (y is None) == (want is None)
    if want is not None:
        dy = np.random.default_rng(1).standard_normal(tuple(want.shape)).astype(np.float32)
        want.backward(torch.tensor(dy))
        y.backward(Tensor(dy))
    for name in ARRAYS:
        assert (ours[name].grad is None) == (theirs[name].grad is None), name
        if ours[name].grad is not None:
            same(ours[name].grad, theirs[name].grad, 5e-4)


@pytest.mark.parametrize('call', calls(TORCH) + calls(FURTHER))
def test_calls_of_torch(torch, call):
    theirs, ours = both(torch)
    want = eval(call, {'f': torch, 'F': torch.nn.functional}, theirs)
    y = eval(call, {'f': pyops, 'F': F}, ours)
    same(y, want)
    same_gradients(torch, y, want, ours, theirs)


@pytest.mark.parametrize('call', calls(LAYERS))
def test_layers_of_torch(torch, call):
    """The layer is what stands before the last parenthesis.  It gets PyTorch's weights."""
    make, _, inputs = call.rpartition('(')
    (theirs, ours), (twin, layer) = both(torch), (eval(make, vars(one)) if one is torch.nn else eval(
        make, {name: getattr(nn, name) for name in nn.__all__}) for one in (torch.nn, nn))
    layer.load_state_dict(twin.state_dict())
    want, y = (eval(f'layer({inputs}', {'layer': one}, names) for one, names in ((twin, theirs), (layer, ours)))
    same(y, want)
    same_gradients(torch, y, want, ours, theirs)
    mine = dict(layer.named_parameters())
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            same(mine[name].grad, parameter.grad, 5e-4)
    for name, buffer in twin.named_buffers():
        if not name.endswith('num_batches_tracked'):
            same(dict(layer.named_buffers())[name], buffer)


@pytest.mark.parametrize('make', calls('''
    SGD(p,.1); SGD(p,.1,.9,nesterov=True,weight_decay=.01); Adam(p,.01); Adam(p,.01,(.8,.9),amsgrad=True);
    AdamW(p,.01,weight_decay=.1);
    RMSprop(p,.01,momentum=.5,centered=True); Adagrad(p,.1,.01); Adadelta(p); Adamax(p,.01); NAdam(p,.01);
    RAdam(p,.05); ASGD(p,.1); Rprop(p,.01)'''))
def test_twenty_steps_of_optimizers(torch, make):
    losses = []
    twin = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model.load_state_dict(twin.state_dict())
    for one, tensor, kinds in ((model, Tensor, optim), (twin, torch.tensor, torch.optim)):
        optimizer = eval(make, vars(kinds), {'p': list(one.parameters())})
        for _ in range(20):
            optimizer.zero_grad()
            y = one(tensor(ARRAYS['x'])) - tensor(ARRAYS['y'][:, :2])
            loss = (y * y).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    np.testing.assert_allclose(losses[:20], losses[20:], rtol=2e-4)
